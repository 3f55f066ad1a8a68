"""Ray Data (extra ``ray``): datasets of granular as datasets of Ray, and datasets of Ray as sharded datasets.

Conversion in the workers of a cluster is ``granular.convert(..., engine='ray')``.
"""

from granular.integrations.ray.reading import Datasource, read
from granular.integrations.ray.writing import Datasink, write

__all__ = ['Datasink', 'Datasource', 'read', 'write']
