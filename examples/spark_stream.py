"""Stream a topic into Parquet. The position is in Spark's checkpoint: the second run goes on where the first ended.

python examples/spark_stream.py
"""

import tempfile

import holdfast
from holdfast.spark import session


def publish(broker: holdfast.Broker, numbers: range) -> None:
    broker.publish_many("orders", [holdfast.NewMessage(body=f"order {n}", key=f"customer-{n % 50}") for n in numbers])


def stream(folder: str) -> int:
    """Read what is there, then end; answers with how many batches that took."""
    orders = (
        session()
        .readStream.format("holdfast")
        .option("path", f"{folder}/shop")
        .option("topic", "orders")
        .option("startingOffsets", "earliest")  # for the first run; later ones look into the checkpoint
        .option("maxOffsetsPerTrigger", 500)
        .option("groupId", "to-parquet")  # its name in `holdfast group ls` while it runs
        .load()
    )
    query = (
        orders.selectExpr("partition", "offset", "timestamp", "CAST(value AS STRING) AS value")
        .writeStream.format("parquet")
        .option("path", f"{folder}/orders")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)  # or processingTime="1 second", to go on
        .start()
    )
    query.awaitTermination()
    return len(query.recentProgress)


def main(folder: str) -> None:
    # The broker stays open, and may go on writing: streams read its files and take no lock.
    with holdfast.open_broker(f"{folder}/shop", body_type=str) as broker:
        broker.create_topic("orders", partitions=2)
        publish(broker, range(1000))
        print("first run:", stream(folder), "batches")
        publish(broker, range(1000, 1010))
        print("second run:", stream(folder), "batch")

    rows = session().read.parquet(f"{folder}/orders")
    print("rows:", rows.count(), "different ones:", rows.select("partition", "offset").distinct().count())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
