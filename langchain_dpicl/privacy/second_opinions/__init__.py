"""Other computations that prices are compared with; none of them lowers a price."""
