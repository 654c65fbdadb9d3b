"""A backend for Django's tasks, their worker, and a page in the admin. Users write `holdfast.django`."""
