"""A pool of rollout engines behind one object: routing, restarts, and requests that go on where a dead engine left them."""
