"""Where the values of weights come from, how a graph reads them, and where packed ones are put."""
