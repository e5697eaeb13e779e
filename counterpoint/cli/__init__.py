"""The top floor: the commands of `counterpoint`. They parse, call and print; heavy modules are imported late."""
