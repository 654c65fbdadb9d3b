"""Ready pipelines from queues to tables and back: declared once, run from a shell or from Python."""
