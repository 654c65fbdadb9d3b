"""What users hold: faces for tasks (`aio`) and threads (`sync`), and the arguments and values that both share."""
