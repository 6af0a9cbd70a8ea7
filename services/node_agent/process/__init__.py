"""Starting, watching and ending the programs of workers on one machine."""
