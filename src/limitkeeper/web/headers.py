"""Public functions for responses: RateLimit fields, their text form, merging into a response, and the body of a refusal."""

from .ratelimit_fields import fields, merge, text_fields
from .refusal_body import body

__all__ = ["body", "fields", "merge", "text_fields"]
