/**
 * Round robin over the servers of a target that report SERVING (gRFC A17), which @grpc/grpc-js does not have.
 *
 * Built on grpc-js's `experimental` interface of load balancers, which may change in a minor version: package.json
 * admits patch versions alone.
 */

import { create } from "@bufbuild/protobuf";
import { Client, type ClientReadableStream, connectivityState, credentials, experimental, status } from "@grpc/grpc-js";
import {
  Health,
  HealthCheckRequestSchema,
  type HealthCheckResponse,
  HealthCheckResponse_ServingStatus as ServingStatus,
} from "./gen/grpc/health/v1/health_pb.js";
import { rpc } from "./rpc.js";

/** The policy's name in a service config: `{ [HEALTHY_ROUND_ROBIN]: { service: "..." } }`. */
export const HEALTHY_ROUND_ROBIN = "draftwood_healthy_round_robin";

const { CONNECTING, READY, TRANSIENT_FAILURE } = connectivityState;
const WATCH = rpc(Health.method.watch);
/** Before a server is asked again whose answer broke off on an open connection. */
const WATCH_AGAIN_MS = 1000;

type ConnectivityState = (typeof connectivityState)[keyof typeof connectivityState];
type Update = Parameters<experimental.ChannelControlHelper["updateState"]>;

class Config implements experimental.TypedLoadBalancingConfig {
  readonly service: string;

  constructor(service: string) {
    this.service = service;
  }

  static createFromJson(json: { service: string }): Config {
    return new Config(json.service);
  }

  getLoadBalancerName(): string {
    return HEALTHY_ROUND_ROBIN;
  }

  toJsonObject(): object {
    return { [HEALTHY_ROUND_ROBIN]: { service: this.service } };
  }
}

/** A connection that is healthy while the server at its end reports SERVING. */
class WatchedSubchannel extends experimental.BaseSubchannelWrapper {
  readonly #service: string;
  readonly #waiting: Set<WatchedSubchannel>;
  readonly #changed: () => void;
  #watch: ClientReadableStream<HealthCheckResponse> | undefined;
  #timer: NodeJS.Timeout | undefined;

  /**
   * @param waiting has this connection in it while it is open and the server has not yet told whether it is ready.
   * @param changed is called when the server has told.
   */
  constructor(
    child: experimental.SubchannelInterface,
    service: string,
    waiting: Set<WatchedSubchannel>,
    changed: () => void,
  ) {
    super(child);
    this.#service = service;
    this.#waiting = waiting;
    this.#changed = changed;
    this.setHealthy(false);
    child.addConnectivityStateListener(this.#onState);
    if (child.getConnectivityState() === READY) {
      this.#start();
    }
  }

  get wrapped(): experimental.SubchannelInterface {
    return this.child;
  }

  protected override destroy(): void {
    this.child.removeConnectivityStateListener(this.#onState);
    this.#stop();
    super.destroy();
  }

  readonly #onState = (_: unknown, _before: ConnectivityState, now: ConnectivityState): void => {
    this.#stop();
    if (now === READY) {
      this.#start();
    }
  };

  #start(): void {
    const channelOverride = this.child.getRealSubchannel().getChannel();
    const client = new Client("unused", credentials.createInsecure(), { channelOverride });
    const request = create(HealthCheckRequestSchema, { service: this.#service });
    const watch = client.makeServerStreamRequest(WATCH.path, WATCH.serialize, WATCH.deserialize, request);
    this.#watch = watch;
    this.#waiting.add(this);
    watch.on("data", (response: HealthCheckResponse) => {
      if (this.#watch === watch) {
        this.#report(response.status === ServingStatus.SERVING);
      } else {
        watch.cancel();
      }
    });
    watch.on("error", () => {});
    watch.on("status", ({ code }) => {
      if (this.#watch === watch) {
        // A server without health checks is taken as it is.
        this.#report(code === status.UNIMPLEMENTED);
        if (code !== status.UNIMPLEMENTED) {
          this.#timer = setTimeout(() => this.#start(), WATCH_AGAIN_MS);
          this.#timer.unref();
        }
      }
    });
  }

  #stop(): void {
    clearTimeout(this.#timer);
    this.#watch?.cancel();
    this.#watch = undefined;
    this.#waiting.delete(this);
    this.setHealthy(false);
  }

  #report(healthy: boolean): void {
    this.#waiting.delete(this);
    this.setHealthy(healthy);
    this.#changed();
  }
}

/** grpc-js's round robin over `WatchedSubchannel`s. While none is healthy and one has not told yet, requests wait. */
class HealthyRoundRobin implements experimental.LoadBalancer {
  readonly #helper: experimental.ChannelControlHelper;
  readonly #child: experimental.ChildLoadBalancerHandler;
  readonly #waiting = new Set<WatchedSubchannel>();
  #service = "";
  #latest: Update | undefined;

  constructor(helper: experimental.ChannelControlHelper) {
    this.#helper = helper;
    const own = experimental.createChildChannelControlHelper(helper, {
      createSubchannel: (address, options) => {
        const child = helper.createSubchannel(address, options);
        return new WatchedSubchannel(child, this.#service, this.#waiting, () => this.#publish());
      },
      updateState: (...update) => {
        this.#latest = update;
        this.#publish();
      },
    });
    this.#child = new experimental.ChildLoadBalancerHandler(own);
  }

  updateAddressList(
    endpoints: experimental.StatusOr<experimental.Endpoint[]>,
    config: experimental.TypedLoadBalancingConfig,
    options: Parameters<experimental.LoadBalancer["updateAddressList"]>[2],
    note: string,
  ): boolean {
    if (!(config instanceof Config)) {
      return false;
    }
    this.#service = config.service;
    return this.#child.updateAddressList(endpoints, ROUND_ROBIN, options, note);
  }

  exitIdle(): void {
    this.#child.exitIdle();
  }

  resetBackoff(): void {
    this.#child.resetBackoff();
  }

  destroy(): void {
    this.#child.destroy();
  }

  getTypeName(): string {
    return HEALTHY_ROUND_ROBIN;
  }

  #publish(): void {
    if (!this.#latest) {
      return;
    }
    const [state, picker, error] = this.#latest;
    if (state === TRANSIENT_FAILURE && this.#waiting.size > 0) {
      this.#helper.updateState(CONNECTING, new experimental.QueuePicker(this), null);
    } else {
      this.#helper.updateState(state, unwrapping(picker), error);
    }
  }
}

/** grpc-js wants the connections in picks without the wrappers of a policy. */
function unwrapping(picker: experimental.Picker): experimental.Picker {
  return {
    pick(args) {
      const picked = picker.pick(args);
      return picked.subchannel instanceof WatchedSubchannel
        ? { ...picked, subchannel: picked.subchannel.wrapped }
        : picked;
    },
  } as experimental.Picker;
}

const ROUND_ROBIN = experimental.parseLoadBalancingConfig({ round_robin: {} });

experimental.registerLoadBalancerType(HEALTHY_ROUND_ROBIN, HealthyRoundRobin, Config);
