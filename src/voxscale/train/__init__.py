"""One worker per rank: it wires task, model, data and plan together and runs the loop."""
