"""What the command is made of, for programs too: a pair of models, runs, chat templates, the frontier, the environment."""
