"""Every picture of the docs by its name: adding one is a function and a line in this table."""

from . import hourglass, ideas, leases, resilience4j, rules, sharding, shared_file, stores

PICTURES = {
    "token-bucket": rules.token_bucket,
    "leaky-bucket": rules.leaky_bucket,
    "leaky-bucket-queue": rules.leaky_bucket_queue,
    "fixed-window": rules.fixed_window,
    "sliding-window-log": rules.sliding_window_log,
    "sliding-window-counter": rules.sliding_window_counter,
    "comparison": ideas.comparison,
    "reservation": ideas.reservation,
    "hourglass": hourglass.hourglass,
    "one-store": stores.one_store,
    "central": stores.central,
    "shared-file": shared_file.shared_file,
    "leases": leases.leases,
    "regions": leases.regions,
    "sharding": sharding.sharding,
    "resilience4j-permissions": resilience4j.permissions,
    "resilience4j-internals": resilience4j.internals,
}
