"""A pipeline of your own is a function from rows to rows; expectations say what its rows must be like.

python examples/spark_pipeline.py
"""

import tempfile

import holdfast
from holdfast.spark import Pipeline, pipeline, read_delta, session


@pipeline(
    source="orders-silver",
    expect=[
        {"name": "known currency", "check": "rate IS NOT NULL", "on_fail": "quarantine"},
        {"name": "for something", "check": "amount > 0", "on_fail": "warn"},
    ],
)
def orders_in_euros(rows):
    """Called with the new rows, batch by batch; what it returns is added to the table orders-in-euros."""
    rate = "CASE currency WHEN 'EUR' THEN 1.0D WHEN 'JPY' THEN 0.006D END AS rate"
    return rows.selectExpr("id", "amount", rate, "dt").selectExpr("*", "amount * rate AS euros")


def publish(folder: str, numbers: range) -> None:
    with holdfast.open_broker(folder, body_type=dict) as broker:
        broker.create_topic("orders", partitions=2, exist_ok=True)
        for n in numbers:
            broker.publish("orders", {"id": n, "amount": float(n), "currency": ("EUR", "JPY", "XXX")[n % 3]})


def report(summaries):
    for done in summaries:
        counts = f"{done.rows_in} in, {done.rows_out} out, {done.quarantined} put aside"
        print(f"{done.pipeline}: {counts}; not as expected: {done.expectations}")


def main(home: str) -> None:
    orders = (
        Pipeline.land("orders", folder=f"{home}/shop", lake=f"{home}/lake")
        .refine("id long not null, amount double, currency string", key="id")
        .apply(orders_in_euros)
    )
    publish(f"{home}/shop", range(90))
    for plan in orders.plan():
        print("a run would write", plan.writes[0].removeprefix(f"{home}/"))
    report(orders.run())
    publish(f"{home}/shop", range(90, 99))
    report(orders.run())  # what is new, and nothing twice
    euros = read_delta(session(), f"{home}/lake/orders-in-euros")
    print("orders:", euros.count(), "euros:", round(euros.selectExpr("sum(euros)").first()[0], 2))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
