"""Write a DataFrame into a topic, exactly once: a job that is run again says which write it is.

python examples/spark_write.py
"""

import tempfile

from pyspark.sql import DataFrame

import holdfast
from holdfast.spark import session


def write(rows: DataFrame, folder: str, day: int) -> None:
    """One day's invoices. Run for the same day once more, it writes nothing."""
    (
        rows.write.format("holdfast")
        .option("path", folder)
        .option("topic", "invoices")
        .option("writeId", "nightly")
        .option("batchId", day)
        .mode("append")
        .save()
    )


def main(folder: str) -> None:
    with holdfast.open_broker(folder) as broker:
        broker.create_topic("invoices", partitions=2)

    spark = session()
    invoices = spark.range(1000).selectExpr(
        "to_json(struct(id, id * 2.5 AS amount)) AS value",
        "CAST(id % 50 AS STRING) AS key",
        "map('kind', 'invoice') AS headers",
        "IF(id % 100 = 0, 9, 0) AS priority",
    )
    write(invoices, folder, 20261116)
    write(invoices, folder, 20261116)  # the scheduler was not sure
    write(invoices.limit(10), folder, 20261117)

    # A folder has one owner at a time: Spark while it writes, and now this process.
    with holdfast.open_broker(folder) as broker:
        print("messages:", broker.describe_topic("invoices").messages)
        mail = broker.group("invoices", "mail")
        with mail.receive(timeout=0) as message:
            print("first:", message.priority, dict(message.headers.pairs), message.body.decode())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(f"{temporary}/shop")
