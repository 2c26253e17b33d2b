"""`pxrs://`: the stores of nodes, over the network. The code above them is the same as embedded."""
