"""What a trial runs: classes and functions of users, and how the process of a trial calls them."""
