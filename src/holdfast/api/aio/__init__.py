"""The faces for tasks, and the ports that they stand on."""
