"""The machine of producers: messages are gathered into parcels by partition, and sent in order, each stored once.

A face (`holdfast.api`) takes messages in and waits for answers. The core (`core`) chooses a partition for each message
and gathers (`accumulator`, `parcels`, `destination`). Rounds (`rounds`), done by a thread or by a task, send what is
due (`sender`) by a port (`port`): to a data folder of this process, or to a server.
"""
