"""Every picture of the docs by its name: adding one is a function and a line in this table."""

from . import clients, concurrency, hourglass, ideas, leases, resilience4j, rules, sharding, shared_file, shares, stores

PICTURES = {
    "token-bucket": rules.token_bucket,
    "leaky-bucket": rules.leaky_bucket,
    "leaky-bucket-queue": rules.leaky_bucket_queue,
    "fixed-window": rules.fixed_window,
    "sliding-window-log": rules.sliding_window_log,
    "sliding-window-counter": rules.sliding_window_counter,
    "comparison": ideas.comparison,
    "reservation": ideas.reservation,
    "client-rules": clients.rules_of_a_client,
    "llm-settlement": clients.token_settlement,
    "hourglass": hourglass.hourglass,
    "one-store": stores.one_store,
    "central": stores.central,
    "shared-file": shared_file.shared_file,
    "leases": leases.leases,
    "regions": leases.regions,
    "sharding": sharding.sharding,
    "fair-shares": shares.fair_shares,
    "bulkhead": concurrency.bulkhead_queue,
    "adaptive-limit": concurrency.adaptive_limit,
    "dependency-caps": concurrency.dependency_caps,
    "task-deliveries": concurrency.task_deliveries,
    "three-protections": concurrency.three_protections,
    "degraded-responses": concurrency.degraded_responses,
    "resilience4j-permissions": resilience4j.permissions,
    "resilience4j-internals": resilience4j.internals,
}
