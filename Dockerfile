# steptime with what needs no PyTorch:   docker build -t steptime . && docker run --rm steptime plan --help
# everything:                            docker build --build-arg EXTRAS=all -t steptime .
# files of yours:                        docker run --rm -v "$PWD:/files" -w /files steptime estimate run.toml
# the page:                              docker run --rm -p 127.0.0.1:8733:8733 steptime serve --host 0.0.0.0
FROM python:3.11-slim

ARG EXTRAS=
WORKDIR /steptime
COPY pyproject.toml README.md LICENSE constraints.txt locked.txt ./
COPY scripts ./scripts
COPY src ./src
RUN pip install --no-cache-dir --require-hashes -r locked.txt \
    && pip install --no-cache-dir --no-deps --no-build-isolation . \
    && if [ -n "$EXTRAS" ]; then pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"; fi \
    && useradd --create-home user
USER user
WORKDIR /home/user
ENTRYPOINT ["steptime"]
CMD ["--help"]
