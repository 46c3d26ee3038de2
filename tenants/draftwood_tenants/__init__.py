"""What tenants and experiments are configured with, followed in a store or a file, and the counts of arms.

`catalog.Catalog` answers what holds for a tenant, `experiments.placement.Placements` in which arm a request is, and
`experiments.counting.Counting` counts it. Servers and plug-ins of engines share this.
"""
