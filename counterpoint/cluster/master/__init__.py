"""The PrimeMaster process: the loop around the pure PrimeManager, its journal, its mastership, and its control socket."""
