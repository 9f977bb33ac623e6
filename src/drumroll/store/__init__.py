"""Everything durable, and the order in which it is written. A run is a directory of plain files a person can open."""
