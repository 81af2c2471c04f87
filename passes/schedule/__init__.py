"""Steps and streams: order, cost, lifetimes, overlap."""
