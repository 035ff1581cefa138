"""Django in one file, with a limit on a view. Run it with: python django_app.py runserver"""

import sys

from django.conf import settings
from django.core.management import execute_from_command_line
from django.http import HttpRequest, JsonResponse
from django.urls import path

from limitkeeper.web.django import limit

settings.configure(
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    SECRET_KEY="for this example only",
    LIMITKEEPER={"STORE": "memory://"},  # several workers: "shared:///dev/shm/shop.limits" or "redis://…"
)


@limit("fixed window 3/min")
def search(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"found": ["tea"]})


urlpatterns = [path("search", search)]

if __name__ == "__main__":
    execute_from_command_line(sys.argv)
