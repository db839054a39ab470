"""Which layers go to which device: a pure function of sizes and speeds."""
