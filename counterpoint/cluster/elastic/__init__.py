"""Elastic training with torch: nodes are checked, found ones meet in torch's rendezvous, and any failure begins a new round."""
