"""Who of a group works on which partitions. Pure: no clock, no disk, no chance, no threads; time is an argument."""
