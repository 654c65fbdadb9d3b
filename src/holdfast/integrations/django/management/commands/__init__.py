"""The commands of `manage.py`; each module is one."""
