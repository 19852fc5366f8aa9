# One image for servers and gateways: docker build -t penstock:0.1.0 .
# With what a Ray cluster or a PostgreSQL store needs: --build-arg EXTRAS=postgres,ray
FROM python:3.12-slim

# Triton compiles what launches its kernels; KubeRay's probes ask with wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev wget \
    && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=postgres
COPY pyproject.toml README.md LICENSE /source/
COPY penstock /source/penstock
RUN pip install --no-cache-dir "/source[${EXTRAS}]" && rm -rf /source

# A new volume takes the owner of the folder that it is mounted over.
RUN mkdir --parents /var/cache/penstock && chown 10001:10001 /var/cache/penstock
ENV HOME=/var/cache/penstock
USER 10001:10001
EXPOSE 8000 8080
ENTRYPOINT ["penstock"]
CMD ["serve"]
