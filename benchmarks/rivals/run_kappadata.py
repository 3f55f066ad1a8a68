"""KappaData's SharedDictDataset, a dictionary in a manager process, read by several workers."""

import importlib.util
import sys
import types

import reading
from measuring import job, tell

# The package imports torchvision, which has no CPU build here; its caches need torch only.
package = types.ModuleType('kappadata')
package.__path__ = list(importlib.util.find_spec('kappadata').submodule_search_locations)
sys.modules['kappadata'] = package

from kappadata.caching import SharedDictDataset  # noqa: E402

if __name__ == '__main__':
    values = reading.values(job['count'], job['size'])
    dataset = SharedDictDataset(values)
    for i in range(len(values)):
        assert dataset[i] == values[i]
    tell(rate=reading.rate(dataset.__getitem__, len(values), job['workers'], job['rounds']))
