"""How weights, optimizer state and activations are held: in which dtype, on which device, and for how long."""
