"""The experiment: a pure state machine that decides, and the shell that carries out its instructions and survives kills."""
