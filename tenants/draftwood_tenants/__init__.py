"""What tenants and experiments are configured with, followed in a store or a file, and the counts of arms.

`catalog.Catalog` has the configuration of each tenant, `experiments.arms.ArmAssigner` assigns a request to an arm, and
`experiments.arms.Counting` counts it. Servers and plug-ins of engines share this.
"""
