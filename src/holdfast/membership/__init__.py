"""Which members of a group work on which partitions. Pure: no clock, disk, randomness or threads."""
