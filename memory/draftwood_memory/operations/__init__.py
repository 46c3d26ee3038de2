"""What operators do with memories: statistics, export, filling, purging, and those that no process uses.

Each operation is a frozen dataclass that can be pickled; `Memory.submit` runs it on the memory thread. Each may raise
MemoryStoreError.
"""

from draftwood_memory.operations.copying import AdoptArm, ExportMemory, FillMemory, FillProgress
from draftwood_memory.operations.orphans import ListOrphans, OrphanedMemory, PurgeOrphans
from draftwood_memory.operations.purging import PurgeArms, PurgeMemory, PurgeResult
from draftwood_memory.operations.statistics import GetStatistics, MemoryStatistics, StatisticsReport

__all__ = [
    "AdoptArm",
    "ExportMemory",
    "FillMemory",
    "FillProgress",
    "GetStatistics",
    "ListOrphans",
    "MemoryStatistics",
    "OrphanedMemory",
    "PurgeArms",
    "PurgeMemory",
    "PurgeOrphans",
    "PurgeResult",
    "StatisticsReport",
]
