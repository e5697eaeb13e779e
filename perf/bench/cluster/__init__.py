"""The cases of `counterpoint bench` about `cluster`: calls, channels, and the manager."""
