"""The PrimeMaster process: the loop around the pure PrimeManager, its state file, its lock, and its control socket."""
