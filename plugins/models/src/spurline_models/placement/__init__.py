"""Place weights, optimizer state and activations: in which dtype they are held, on which device, and for how long."""
