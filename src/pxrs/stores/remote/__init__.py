"""`pxrs://`: the stores of nodes, over the wire. Everything on top of them is the embedded code."""
