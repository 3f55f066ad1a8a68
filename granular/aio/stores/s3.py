"""S3 and what speaks its protocol: reads with a signature per object, all else through s3fs."""

import asyncio
import base64
import contextlib
import datetime
import email.utils
import logging
import os
import re
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from granular.aio.loops import need_loop
from granular.aio.stores import endpoints, translating
from granular.aio.stores.base import Entry, Folders, Kept, ObjectWriter, Stat, Upload, check_options
from granular.aio.stores.remote import Client, RemoteStore
from granular.aio.threads import offload
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    StoreError,
)
from granular.hiding import hidden, without_user

_ETAG = re.compile(r'[0-9a-f]{32}(-\d+)?')
_BATCH = 1000  # keys in one delete request
_REGION = re.compile(r'[a-z]{2,4}(-[a-z]{2,12}){1,3}-\d{1,2}')

_TAKEN = ('412', 'PreconditionFailed', 'ConditionalRequestConflict')  # what is to be new is there
_FIXED = {'x-amz-checksum-mode': 'ENABLED'}  # asks for the checksum of an object that is read whole

logger = logging.getLogger('granular')


class S3Store(RemoteStore['S3Client']):
    """One bucket.

    Options: ``key``, ``secret``, ``token``, ``profile``, ``anon``, ``endpoint_url``, ``region``, ``requester_pays``,
    ``tls_verify``, and what else :class:`s3fs.S3FileSystem` takes. Where they are silent, the environment and the chain
    of botocore speak.
    """

    has_folders = False
    variables = (
        *('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'AWS_DEFAULT_PROFILE', 'AWS_PROFILE'),
        *('AWS_SHARED_CREDENTIALS_FILE', 'AWS_CONFIG_FILE'),
    )
    endpoint: endpoints.S3Endpoint

    def _find_endpoint(self) -> endpoints.S3Endpoint:
        return endpoints.s3(self.options, os.environ)

    def _endpoint_options(self) -> dict[str, Any]:
        return {} if self.endpoint.url is None else {'endpoint_url': without_user(self.endpoint.url)}

    def _space(self) -> str:
        return self.endpoint.identity

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.root.removeprefix('s3://')

    async def make_client(self) -> 'S3Client':
        # Importing botocore and loading its models takes a while: not on the loop.
        return await offload(S3Client, self)

    async def stat(self, key: str) -> Stat:
        client = await self.client()
        fs = await client.filesystem()
        with translated(self.url(key)):
            if not key:
                await fs._call_s3('head_bucket', Bucket=self.bucket)
                return Stat(0, is_dir=True)
            with contextlib.suppress(FileNotFoundError):
                head = await fs._call_s3('head_object', Bucket=self.bucket, Key=key)
                return Stat(head['ContentLength'], head['LastModified'].timestamp(), head['ETag'])
            page = await fs._call_s3('list_objects_v2', Bucket=self.bucket, Prefix=f'{key}/', MaxKeys=1)
        if page.get('Contents'):
            return Stat(0, is_dir=True)
        raise NotFoundError(f'{self.url(key)}: no such object or folder')

    async def kept(self, key: str) -> Kept:
        client = await self.client()
        fs = await client.filesystem()
        with translated(self.url(key)):
            head = await fs._call_s3('head_object', Bucket=self.bucket, Key=key, ChecksumMode='ENABLED')
        etag, digests = head['ETag'].strip('"'), {}
        # https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html: encrypted otherwise, it is no MD5.
        plain = head.get('ServerSideEncryption', 'AES256') == 'AES256' and 'SSECustomerAlgorithm' not in head
        if plain and not self.bucket.endswith('--x-s3') and (match := _ETAG.fullmatch(etag)):
            digests['parts' if match[1] else 'md5'] = etag
        crc = head.get('ChecksumCRC32C', '-')
        if '-' not in crc and head.get('ChecksumType', 'FULL_OBJECT') == 'FULL_OBJECT':
            digests['crc32c'] = base64.b64decode(crc).hex()
        return Kept(head['ContentLength'], head['ETag'], digests)

    def digest_kind(self, size: int) -> str:
        return 'md5' if size <= self.config.part_size else 'parts'

    async def _pages(self, key: str, prefix: str, **options: Any) -> AsyncIterator[dict[str, Any]]:
        client = await self.client()
        fs = await client.filesystem()
        options = {'Bucket': self.bucket, 'Prefix': f'{key}/{prefix}' if key else prefix, **options}
        found = not key or bool(prefix)
        while True:
            await need_loop()  # a page may be asked for from another thread than the one before
            with translated(self.url(key)):
                page: dict[str, Any] = await fs._call_s3('list_objects_v2', **options)
            if not found and not page.get('CommonPrefixes') and not page.get('Contents'):
                raise NotFoundError(f'{self.url(key)}: no such folder')
            found = True
            yield page
            if not page.get('IsTruncated'):
                return
            options['ContinuationToken'] = page['NextContinuationToken']

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        async for page in self._pages(key, prefix, Delimiter='/'):
            for folder in page.get('CommonPrefixes', ()):
                yield Entry(folder['Prefix'][:-1], True)
            for item in page.get('Contents', ()):
                # A key that ends in a slash marks a folder, and the folder itself is no entry of it.
                if not item['Key'].endswith('/'):
                    yield Entry(item['Key'], False, item['Size'], item['LastModified'].timestamp())

    async def scan_tree(self, key: str) -> AsyncIterator[Entry]:
        folders = Folders(key)
        async for page in self._pages(key, ''):
            for item in page.get('Contents', ()):
                for folder in folders.of(item['Key']):
                    yield folder
                if not item['Key'].endswith('/'):
                    yield Entry(item['Key'], False, item['Size'], item['LastModified'].timestamp())

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.s3writing import S3Writer

        client = await self.client()
        return S3Writer(self, await client.filesystem(), key, new)

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        client = await self.client()
        fs = await client.filesystem()
        if not key:
            with translated(self.root):
                try:
                    await fs._call_s3('head_bucket', Bucket=self.bucket)
                except FileNotFoundError:
                    place = {'CreateBucketConfiguration': {'LocationConstraint': client.region}}
                    await fs._call_s3(
                        'create_bucket', Bucket=self.bucket, **({} if client.region == 'us-east-1' else place)
                    )
                    return
            if not exist_ok:
                raise AlreadyExistsError(f'{self.root}: exists already')
        elif not exist_ok:
            with contextlib.suppress(NotFoundError):
                await self.stat(key)
                raise AlreadyExistsError(f'{self.url(key)}: exists already')

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self.client()
        fs = await client.filesystem()
        with translated(self.url(keys[0]) if keys else self.root):
            if len(keys) == 1:
                await fs._call_s3('delete_object', Bucket=self.bucket, Key=keys[0])
                return
            for i in range(0, len(keys), _BATCH):
                objects = [{'Key': key} for key in keys[i : i + _BATCH]]
                out = await fs._call_s3('delete_objects', Bucket=self.bucket, Delete={'Objects': objects})
                if failed := out.get('Errors'):
                    raise StoreError(
                        f'{self.url(failed[0]["Key"])}: not deleted: {failed[0].get("Code")}, as {len(failed)} of '
                        f'{len(objects)} objects'
                    )

    async def delete_tree(self, key: str) -> None:
        async for page in self._pages(key, ''):
            await self.delete([item['Key'] for item in page.get('Contents', ())])

    async def uploads(self, key: str) -> AsyncIterator[Upload]:
        from granular.aio.stores.s3writing import uploads

        client = await self.client()
        fs = await client.filesystem()
        async for upload in uploads(self, fs, key):
            yield upload

    async def abort_upload(self, upload: Upload) -> None:
        from granular.aio.stores.s3writing import abort

        await abort(self.url(upload.key), await (await self.client()).filesystem(), self.bucket, upload.key, upload.id)

    async def copy_within(self, source: str, target: str) -> bool:
        client = await self.client()
        fs = await client.filesystem()
        with translated(self.url(source)):
            await fs._cp_file(f'{self.bucket}/{source}', f'{self.bucket}/{target}')
        return True


class S3Client(Client):
    """A bucket under one event loop. Made on a worker thread, as botocore reads files and services for it."""

    def __init__(self, store: S3Store) -> None:
        super().__init__()
        try:
            import s3fs
            from botocore.session import Session
        except ImportError as error:
            raise MissingExtraError("s3:// needs s3fs: pip install 'granular[s3]'") from error
        check_options(store.root, store.options, s3fs.S3FileSystem, ('profile', 'region', 'tls_verify'))
        self._store = store
        options = dict(store.options)
        self._anon = bool(options.get('anon'))
        self._session = Session(profile=options.get('profile'))
        self._fs: Any = None
        self._fs_lock = asyncio.Lock()
        with translated(store.root):
            self._session.get_scoped_config()  # which complains of a profile that does not exist
            options.pop('endpoint_url', None)
            options.pop('region', None)
            self._endpoint, self.region, _ = store.endpoint
            if 'key' in options and 'secret' in options:
                self._session.set_credentials(options['key'], options['secret'], options.get('token'))
            self._credentials = None if self._anon else self._session.get_credentials()
        self._fixed = self._anon or 'key' in options
        if self._credentials is None and not self._anon:
            raise AccessDeniedError(
                f'{store.root}: no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, '
                f'pass key= and secret=, or anon=True for a public bucket'
            )
        self._options = options
        self._base = self._address()
        self._skew = datetime.timedelta()

    def _address(self) -> str:
        bucket = self._store.bucket
        if self._endpoint:
            parts = urllib.parse.urlsplit(self._endpoint)
            if parts.scheme not in ('http', 'https') or parts.username or parts.password:
                raise InvalidArgumentError(
                    f'{self._store.root}: endpoint_url must be http(s)://host, without credentials'
                )
            return f'{self._endpoint.rstrip("/")}/{bucket}'
        domain = 'amazonaws.com.cn' if self.region.startswith('cn-') else 'amazonaws.com'
        if '.' in bucket:  # its certificate would not match
            return f'https://s3.{self.region}.{domain}/{bucket}'
        return f'https://{bucket}.s3.{self.region}.{domain}'

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        url = f'{self._base}/{urllib.parse.quote(key, safe="/~-_.")}'
        if self._credentials is None:
            return url, dict(_FIXED)
        with translated(self._store.url(key)):
            if getattr(self._credentials, 'refresh_needed', bool)():
                await offload(self._credentials.get_frozen_credentials)
            frozen = self._credentials.get_frozen_credentials()
        return url, self._signature(url, frozen)

    async def find_credentials(self) -> bool:
        def find() -> Any:
            from botocore.session import Session

            with translated(self._store.root):
                # A session keeps what it found: a new one asks the providers again.
                return Session(profile=self._store.options.get('profile')).get_credentials()

        if self._fixed:
            return False
        self._credentials = await offload(find)
        return self._credentials is not None

    async def move(self, region: str) -> bool:
        # An endpoint that was given is not left; and a name that is none would be part of a host's.
        if self._endpoint or not _REGION.fullmatch(region):
            return False
        if region != self.region:
            logger.info('%s is in region %s, not %s', self._store.root, region, self.region)
            self.region = region
            self._base = self._address()
        return True

    def set_clock(self, date: str) -> bool:
        try:
            theirs = email.utils.parsedate_to_datetime(date)
        except ValueError:
            return False
        self._skew = theirs - datetime.datetime.now(datetime.UTC)
        logger.warning("%s: this machine's clock is %s behind the store's", self._store.root, self._skew)
        return True

    def _signature(self, url: str, frozen: Any) -> dict[str, str]:
        """Headers signed for the object, not for a range of it: Range is added later and may be any."""
        from botocore.awsrequest import AWSRequest

        from granular.aio.stores.signing import Signer

        payer = {'x-amz-request-payer': 'requester'} if self._options.get('requester_pays') else {}
        request = AWSRequest('GET', url, headers={**_FIXED, **payer})
        Signer(frozen, self.region, self._skew).add_auth(request)
        return dict(request.headers.items())

    async def filesystem(self) -> Any:
        """The s3fs that lists, writes, copies and deletes."""
        if self._fs is None:
            async with self._fs_lock:
                if self._fs is None:
                    self._fs = await offload(self._make_filesystem)
        return self._fs

    def _make_filesystem(self) -> Any:
        import s3fs

        options = {name: value for name, value in self._options.items() if name not in ('client_kwargs', 'tls_verify')}
        config: dict[str, Any] = {'max_pool_connections': 32, **options.pop('config_kwargs', {})}
        if self._endpoint:
            # Servers of others know the protocol of old: no trailing checksums, no bucket in the host's name.
            config.setdefault('s3', {'addressing_style': 'path'})
            config.setdefault('request_checksum_calculation', 'when_required')
            config.setdefault('response_checksum_validation', 'when_required')
        trusted = {} if self._store.tls_verify is True else {'verify': self._store.tls_verify}
        fs = s3fs.S3FileSystem(
            **options,
            endpoint_url=self._endpoint,
            client_kwargs={**self._options.get('client_kwargs', {}), 'region_name': self.region, **trusted},
            config_kwargs=config,
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        # Making a client reads models and writes classes for up to half a second, but binds it to no loop: that happens
        # at its first request. So it is made under a loop of this thread's own.
        loop = asyncio.new_event_loop()
        try:
            with translated(self._store.root):
                loop.run_until_complete(fs.set_session())
        finally:
            loop.close()
        return fs

    async def aclose(self) -> None:
        await super().aclose()
        if self._fs is not None and self._fs._s3 is not None:
            await self._fs._s3creator.__aexit__(None, None, None)


def translated(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn the errors of botocore and s3fs into ours."""
    return translating.translated(name, _ours)


def _ours(name: str, error: Exception) -> GranularError | None:
    import botocore.exceptions as botocore

    if isinstance(error.__cause__, botocore.ClientError) and _code(error.__cause__) in _TAKEN:
        error = error.__cause__  # of which s3fs makes an invalid argument
    if isinstance(error, botocore.ClientError):
        code = _code(error)
        if code in ('404', 'NoSuchKey', 'NoSuchBucket', 'NoSuchUpload'):
            return NotFoundError(f'{name}: there is no such bucket or object ({code})')
        if code in _TAKEN:
            return AlreadyExistsError(f'{name}: another writer has published it meanwhile ({code})')
        if code in ('401', '403', 'AccessDenied', 'InvalidAccessKeyId', 'SignatureDoesNotMatch', 'ExpiredToken'):
            return AccessDeniedError(f'{name}: access denied ({code}): check the credentials and their rights')
        return StoreError(f'{name}: {hidden(str(error))}')
    if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError | botocore.ProfileNotFound):
        return AccessDeniedError(f'{name}: {error}')
    said = f'{name}: {type(error).__name__}: {hidden(str(error))}'
    return StoreError(said) if isinstance(error, botocore.BotoCoreError) else None


def _code(error: Any) -> str:
    return str(error.response.get('Error', {}).get('Code', ''))
