"""Spark, in one process of its own for the whole run: a JVM for each sample would cost more than what is measured."""
