"""What passes between the rooms: frozen data, units and errors. Standard library only; imports nothing of the package."""
