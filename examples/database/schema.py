"""The table of the database examples, and an insert that records how many writes were running at that moment."""

NAME = "limitkeeper-example"  # application_name of the writing connections
CREATE = "CREATE TABLE IF NOT EXISTS orders (id bigserial PRIMARY KEY, item text NOT NULL, running int NOT NULL)"
#: A write of 10 ms. `running` counts the active inserts of the example at its end, itself included.
INSERT = """
INSERT INTO orders (item, running)
SELECT {item}, (
  SELECT count(*) FROM pg_stat_activity
  WHERE state = 'active' AND application_name = 'limitkeeper-example' AND strpos(query, 'INSERT INTO orders') > 0
)
FROM pg_sleep(0.01)
"""
