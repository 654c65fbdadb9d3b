"""Read a topic into a DataFrame, and ask the folder in SQL: messages, groups, dead letters.

python examples/spark_batch.py
"""

import json
import tempfile

import holdfast
from holdfast.spark import register_tables, session


def fill(folder: str) -> None:
    with holdfast.open_broker(folder, body_type=dict) as broker:
        broker.create_topic("orders", partitions=3)
        orders = [{"id": n, "country": ("de", "fr", "jp")[n % 3], "amount": n % 7 + 0.5} for n in range(3000)]
        broker.publish_many("orders", [holdfast.NewMessage(body=order, key=str(order["id"])) for order in orders])
        billing = broker.group("orders", "billing")
        for message in billing.receive_many(100):
            if message.body["id"] % 10 == 3:
                message.reject("no such customer")
            else:
                message.ack()


def main(folder: str) -> None:
    fill(folder)
    spark = session()

    orders = spark.read.format("holdfast").option("path", folder).option("topic", "orders").load()
    print("columns:", *orders.columns)
    print("messages:", orders.count())

    # Only what a schema names is read from the files; text is UTF-8.
    values = spark.read.format("holdfast").option("path", folder).option("topic", "orders").schema("value string")
    typed = values.load().selectExpr("from_json(value, 'id long, country string, amount double') AS o").select("o.*")
    for row in typed.groupBy("country").sum("amount").orderBy("country").collect():
        print(row.country, row["sum(amount)"])

    # Only these offsets: `earliest` and `latest` are -2 and -1, as with Kafka.
    some = json.dumps({"orders": {"0": 10, "1": -1, "2": -1}})
    until = json.dumps({"orders": {"0": 15, "1": -1, "2": -1}})
    slice_of_0 = spark.read.format("holdfast").options(path=folder, startingOffsets=some, endingOffsets=until)
    print("offsets:", *[row.offset for row in slice_of_0.option("subscribe", "orders").load().collect()])

    print("views:", *register_tables(spark, folder))
    dead = spark.sql("SELECT error, count(*) AS count FROM dead_letters WHERE state = 'waiting' GROUP BY error")
    print("dead letters:", *[f"{row.error}: {row['count']}" for row in dead.collect()])
    lag = spark.sql("SELECT sum(lag) AS lag FROM groups WHERE `group` = 'billing'").first()
    print("not billed yet:", lag.lag)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/shop")
