"""How a data folder stands, read beside whoever owns it: no lock is taken and nothing is written."""
