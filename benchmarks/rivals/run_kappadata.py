"""KappaData's SharedDictDataset, a dictionary in a manager process, read by several workers."""

import importlib.util
import json
import pathlib
import sys
import types

import reading

# The package imports torchvision, which has no CPU build here; its caches need torch only.
package = types.ModuleType('kappadata')
package.__path__ = list(importlib.util.find_spec('kappadata').submodule_search_locations)
sys.modules['kappadata'] = package

from kappadata.caching import SharedDictDataset  # noqa: E402

job = json.loads(pathlib.Path(sys.argv[1]).read_text())

if __name__ == '__main__':
    values = reading.values(job['count'], job['size'])
    dataset = SharedDictDataset(values)
    for i in range(len(values)):
        assert dataset[i] == values[i]
    print(json.dumps({'rate': reading.rate(dataset.__getitem__, len(values), job['workers'], job['rounds'])}))
