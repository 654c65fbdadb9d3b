"""The state of a data folder, read while another process may own it: takes no lock and writes nothing."""
