"""What happens when memory ran out: texts are read, failures explained, arrays moved together again."""
