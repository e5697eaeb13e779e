"""The service: a daemon of many driven runs, whose clients ask for contributions, updates, saves and samples one by one."""
