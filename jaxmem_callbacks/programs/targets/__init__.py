"""Hardware that is not there: a program is exported here and compiled for it in a worker process."""
