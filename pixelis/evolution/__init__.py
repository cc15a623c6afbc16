"""How traffic becomes learning: votes, the gate, update tasks. Pure logic, no Ray, no torch."""
