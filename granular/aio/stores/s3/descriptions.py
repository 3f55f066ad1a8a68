"""Loader of the descriptions of services for botocore, which a process that reads one bucket loads once.

botocore's own lists the files of all 400 services to know whether S3 is one of them, and reads JSON into ordered
dictionaries: both take longer than all else that it does for a first request.
"""

import gzip
import json
from typing import Any, Final

from botocore.loaders import JSONFileLoader, Loader, create_loader

_OPENERS: Final = (('.json', open), ('.json.gz', gzip.open))


def loader_of(folders: str | None) -> Loader:
    """Return a loader of the descriptions in some folders, as ``data_path`` has them, and in those of botocore."""
    return _Loader(create_loader(folders))


class _Files(JSONFileLoader):  # type: ignore[misc]
    def load_file(self, file_path: str) -> Any:
        for ending, opener in _OPENERS:
            try:
                with opener(file_path + ending, 'rb') as file:
                    return json.loads(file.read())
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                continue
        return None


class _Loader(Loader):  # type: ignore[misc]
    def __init__(self, plain: Loader) -> None:
        super().__init__(plain.search_paths, _Files(), include_default_search_paths=False)
        self._plain = plain

    def list_available_services(self, type_name: str) -> list[str]:
        return ['s3']

    def load_service_model(self, service_name: str, type_name: str, api_version: str | None = None) -> Any:
        if service_name == 's3':
            return super().load_service_model(service_name, type_name, api_version)
        return self._plain.load_service_model(service_name, type_name, api_version)
