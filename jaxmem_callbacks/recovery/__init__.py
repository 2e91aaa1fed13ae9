"""What happens when memory ran out: the doors. Texts are read, failures explained, arrays moved together, steps done again."""
